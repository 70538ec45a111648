# Shared by up, down and node: sourced, not run. STATE is the cluster's folder.

T0=$(date +%s%N)
say() { printf 'lab: [%5.1fs] %s\n' "$(awk -v a="$T0" -v b="$(date +%s%N)" 'BEGIN{print (b-a)/1e9}')" "$*" >&2; }
die() { say "FAILED: $*"; exit 1; }

# pid_of PIDFILE NAME: the pid in PIDFILE if it lives and runs a program called NAME. The name guards against a pid that
# something else has been given since; a zombie is dead (where process 1 is no real init it may be buried late).
pid_of() {
  local pid; pid=$(cat "$1" 2>/dev/null) || return 1
  [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] &&
    ! grep -q '^State:[[:space:]]*Z' "/proc/$pid/status" 2>/dev/null && echo "$pid"
}
alive() { pid_of "$@" >/dev/null; }

# wait_for SECONDS WHAT COMMAND...: tries COMMAND every 50 ms until it succeeds.
wait_for() {
  local limit=$1 what=$2 t=$SECONDS; shift 2
  until "$@" >"$STATE/log/wait.out" 2>&1; do
    if [ $((SECONDS - t)) -ge "$limit" ]; then
      tail -3 "$STATE/log/wait.out" >&2
      die "$what did not come up in ${limit}s; see $STATE/log"
    fi
    sleep 0.05
  done
}

# gone PID...: waits up to 10 s for all of them, then SIGKILL.
gone() {
  local t=$SECONDS p
  for p in "$@"; do
    while [ -d "/proc/$p" ] && [ "$(awk '/^State/{print $2}' "/proc/$p/status" 2>/dev/null)" != Z ]; do
      if [ $((SECONDS - t)) -ge 10 ]; then kill -9 "$p" 2>/dev/null || true; fi
      sleep 0.05
    done
  done
}
