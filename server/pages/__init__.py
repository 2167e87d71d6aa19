"""What people look at: recent queries, one of them, the pool, an app to try. Plain files, nothing from elsewhere."""
