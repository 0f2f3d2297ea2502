"""What `fdfo doctor` looks at, a file per part of an installation; each gives findings."""
