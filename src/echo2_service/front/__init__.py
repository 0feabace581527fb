"""What tenants talk to: HTTP, their accounts and requests, and what is stored of them."""
