"""One optimizer over several meshes: AdamW and others, Muon, clipping, the schedule."""
