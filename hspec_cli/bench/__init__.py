"""`hspec bench`: methods side by side on this host. Records, a runner, and what is made of them."""
