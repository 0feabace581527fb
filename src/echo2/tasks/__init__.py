"""Room 1 of the path: what to solve. Rows from files, hubs, generators and user classes, and the order they come in."""
