"""Losses on judged answers: of pairs `-> losses_P`, of labelled answers `-> losses_S`; a batch's loss is their mean."""
