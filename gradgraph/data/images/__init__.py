"""Images: folders, tables of files, class labels and preprocessing."""
