"""The vocabulary of requests: what engines are asked for, what they answer, and how lists in answers are read."""
