"""What runs requests: one folder by what runs below it. `base` is the seam, `conformance` what every engine keeps."""
