"""The blocked layout (NCHWc): nodes between blocked convolutions that also compute in blocks of channels."""
