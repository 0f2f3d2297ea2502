"""`fdfo eval`: how often a server is right, and whether two runs differ."""
