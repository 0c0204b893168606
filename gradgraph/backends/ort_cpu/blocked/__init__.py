"""What lies between blocked convolutions: which nodes compute in blocks of channels (NCHWc), too, and how."""
