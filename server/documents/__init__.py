"""Documents that clients give: checked, read in a process of their own, kept for a while, fetched where allowed."""
