"""Losses on judged answers: pairs `-> losses_P`, labelled answers `-> losses_S`; a batch's loss is the mean."""
