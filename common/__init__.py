"""What both services use: settings, errors, logging, packing, the model folder and the gRPC server frame. No torch."""

__version__ = "0.1.0"
