"""Which machines a run needs: the fleet's measures, the formulas, activation and renting."""
