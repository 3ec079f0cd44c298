"""What our two servers share, the page and the API: how requests are read, checked and refused, and by whom sent."""
