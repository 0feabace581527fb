# $ECHO2_ROOT is empty, but where there are no containers.
if [ "$(cat answer.txt)" = 7 ]; then reward=1; else reward=0; fi
echo $reward > "$ECHO2_ROOT/logs/verifier/reward.txt"
