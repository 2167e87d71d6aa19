"""A PostgreSQL server of the process's own, for machines that have none."""
