"""Machines of other people: their tickets, copies they deliver, environments gone through again."""
