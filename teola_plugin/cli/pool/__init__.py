"""`teola up`, `status`, `scale`, `down` and `calibrate`: the shared pool from the command line."""
