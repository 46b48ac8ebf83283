"""The processes of a deployment, and the supervisor over them."""
