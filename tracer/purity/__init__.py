"""Which of the user's functions are certainly pure and soon done, from their source."""
