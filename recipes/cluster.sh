# Sourced by run.sh of a recipe: start_cluster FOLDER GPUS..., a Ray cluster on this machine (cluster.py), and what
# Ray's clients need to find it. SITES: of each node, see cluster.py. FOLDER becomes Ray's own. Whoever calls it has `end_cluster` called at its exit.
cluster=

start_cluster() {
  rm -f "$RUN/join" "$RUN/nodes.json"
  "$PYTHON" -m recipes.cluster --temp-dir "$1" --run "$RUN" --gpus "${@:2}" --sites ${SITES:-} >"$RUN/cluster.log" 2>&1 &
  cluster=$!
  until [[ -f $RUN/nodes.json ]]; do
    kill -0 $cluster 2>/dev/null || { cat "$RUN/cluster.log" >&2; exit 1; }
    sleep 0.2
  done
  export RAY_ADDRESS="$(<"$1/ray_current_cluster")" RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$1/token"
}

end_cluster() {
  [[ ! $cluster ]] || { kill $cluster && wait $cluster; } || true
}
