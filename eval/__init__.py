"""What a head is worth: the reference decoder, acceptance, losslessness, speed, engines, report."""
