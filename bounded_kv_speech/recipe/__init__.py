"""How the voice is made: corpus, codec, language model. Nothing here is needed to speak."""
