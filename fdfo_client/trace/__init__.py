"""`fdfo trace`: a run recorded round by round, as a page and as a file for trace viewers."""
