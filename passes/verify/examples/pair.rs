use frit_ir::{Graph, OutputKind};
use frit_verify::{Comparer, Ranks, on_large_stack};
use std::collections::BTreeMap;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let g = |p: &str| frit_ir::text::parse(&std::fs::read_to_string(p).unwrap()).unwrap();
    let ranks = Ranks { shards: a[2].parse().unwrap(), replicas: a[3].parse().unwrap() };
    let named = |g: &Graph| -> BTreeMap<String, frit_ir::ValueId> {
        let mut m = BTreeMap::new();
        for (_, n) in g.nodes() {
            if n.op.is_leaf() {
                continue;
            }
            for v in &n.outputs {
                if let Some(name) = &g.value(*v).name {
                    if !name.chars().all(|c| c.is_ascii_digit()) {
                        m.insert(name.to_string(), *v);
                    }
                }
            }
        }
        m
    };
    on_large_stack(|| {
        let mut c = if a[1].starts_with("real") {
            Comparer::of_real_numbers()
        } else {
            Comparer::of_rounded_numbers()
        };
        for w in a[4..].windows(2) {
            let (mut x, mut y) = (g(&w[0]), g(&w[1]));
            if a[1].ends_with("grad") {
                x = frit_verify::gradient::differentiated(
                    &x,
                    1,
                    std::env::var("CAP").map_or(1.0, |c| c.parse().unwrap()),
                )
                .unwrap();
            }
            if a[1].ends_with("names") {
                let (m, n) = (named(&x), named(&y));
                for (k, v) in &m {
                    if let Some(u) = n.get(k) {
                        if x.ty(*v) == y.ty(*u) {
                            x.add_output(k, *v, OutputKind::Result);
                            y.add_output(k, *u, OutputKind::Result);
                        }
                    }
                }
            }
            let s = std::time::Instant::now();
            if x == y {
                println!("{} same", w[1]);
                continue;
            }
            let d = c.compare(&x, &y, ranks);
            println!("{} {} differences {:?}", w[1], d.len(), s.elapsed());
            let list = y.to_string();
            let mut d: Vec<_> = d
                .iter()
                .map(|d| {
                    let n = d.output.rsplit(' ').next().unwrap();
                    (list.find(&format!("%{n}:")).unwrap_or(usize::MAX), d)
                })
                .collect();
            d.sort_by_key(|d| d.0);
            for (_, d) in d.iter().take(3) {
                println!("   {} {}", d.output, d.what);
            }
        }
    });
}
