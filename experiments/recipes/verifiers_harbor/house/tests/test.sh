#!/bin/sh
if [ "$(cat made.txt)" = house ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
