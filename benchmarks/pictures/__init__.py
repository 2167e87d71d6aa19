"""Charts of the results, light and dark, as SVG: `python -m benchmarks.pictures docs/images`."""
