"""`engines=`: engines and bindings that are made by themselves, for the user's own models."""
