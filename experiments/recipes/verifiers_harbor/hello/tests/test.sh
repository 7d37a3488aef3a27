#!/bin/sh
if [ "$(cat made.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
