"""The five applications of `examples/apps` against the paper's baselines, all on the same engines."""
