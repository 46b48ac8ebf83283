"""A whole deployment: what its file says, the parts that follow from it, and the supervisor that keeps them running."""
