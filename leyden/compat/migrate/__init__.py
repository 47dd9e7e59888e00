"""`leyden migrate`: scripts of Lightning and Accelerate, rewritten for Leyden."""
