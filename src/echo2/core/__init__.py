"""What every room may use: nouns, errors, files, devices, processes and their logs. It knows no other room."""
