"""Tasks: rows from files, hubs, generators and user classes, and their order."""
