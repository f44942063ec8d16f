"""RMSNorm and rotary embedding of the heads of one token a sequence."""
