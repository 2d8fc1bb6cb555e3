"""The nouns everything else uses: types, trees, errors, configuration, clocks, files."""
