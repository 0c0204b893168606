"""Models that packages of the public Python index carry, with the weights that their users run: do they train?"""
