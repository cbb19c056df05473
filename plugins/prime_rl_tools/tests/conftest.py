"""Its presence puts the helpers of this folder on the import path of every test below."""
