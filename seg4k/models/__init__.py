"""What is trained: a timm ViT encoder, a neck and a U-Net decoder, as an ordered set of segments."""
