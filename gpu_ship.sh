# Packs without Python, 10,000 steps of captured dynamics, a first call from a pack: on a GPU, at most 170 s.
T0=$(date +%s); . .carry/head.sh
export OMP_NUM_THREADS=2 PYTHONPATH=$PWD:$PYTHONPATH
mkdir -p ~/ship; rm -rf ~/ship/*
left() { echo $((T0 + ${1:-165} - $(date +%s))); }
dynamics() { timeout -s INT -k 3 $(left) python tests/support/long_dynamics.py "$@"; }
(dynamics captured --start ~/ship/a.npz --out $OUT/captured.json > $OUT/captured.txt 2>&1) &
(until [ -f ~/ship/a.npz ] || [ $(left) -lt 60 ]; do sleep 0.5; done; sleep 1
 dynamics stock --steps 3000 --start ~/ship/a.npz --out $OUT/stock.json > $OUT/stock.txt 2>&1) &
(dynamics captured --structure diamond --squeeze --stiffness 1 --temperature 1000 --relax 0 --steps 500 --step-fs 0.5 --sample 25 \
    --start ~/ship/d.npz --out $OUT/diamond.json > $OUT/diamond.txt 2>&1) &
for what in float64 float32; do
    (timeout -s INT -k 3 $(left) python -m pytest -q -s -p no:cacheprovider --tb=short -m gpu tests/models/test_mace_exported.py -k $what \
        > $OUT/exported_$what.txt 2>&1) &
done
(timeout -s INT -k 3 $(left) python -m pytest -q -s -p no:cacheprovider --tb=short -m gpu tests/kernelgen/packs > $OUT/packs.txt 2>&1) &
wait
echo "== $(( $(date +%s) - T0 )) s"
for one in captured stock diamond; do grep -E "^($one|captured|stock) " $OUT/$one.txt || tail -4 $OUT/$one.txt | cut -c1-300; done
for one in exported_float64 exported_float32; do echo "== $one"; grep -E "differs|first call|passed|failed|^E " $OUT/$one.txt | cut -c1-200 | tail -14; done
echo "== packs"; grep -E "passed|failed|^E |s from" $OUT/packs.txt | cut -c1-200 | tail -12
