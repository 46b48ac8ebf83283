"""Every table and picture of the documents the project comes from, measured with their parameters, and kept."""
