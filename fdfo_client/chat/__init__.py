"""`fdfo chat`: a conversation whose answers appear as their blocks are denoised."""
