"""The small models that come with the package, and how they compute."""
