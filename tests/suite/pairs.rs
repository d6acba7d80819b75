//! Tables of settings that contain every pair (all-pairs testing).

use std::collections::BTreeSet;

/// A level of each factor, or of some.
pub(crate) type Row = Vec<Option<usize>>;

/// Rows of levels, one of each factor, that hold every possible pair of levels: each takes what holds most pairs that
/// none has held.
pub(crate) fn rows(factors: &[&[&str]], is_possible: impl Fn(&Row) -> bool) -> Vec<Vec<usize>> {
    let pair = |(f, a), (g, b)| {
        let mut row = vec![None; factors.len()];
        (row[f], row[g]) = (Some(a), Some(b));
        row
    };
    let levels = |f: usize| 0..factors[f].len();
    let mut open: BTreeSet<Row> = BTreeSet::new();
    for f in 0..factors.len() {
        for g in f + 1..factors.len() {
            open.extend(levels(f).flat_map(|a| levels(g).map(move |b| pair((f, a), (g, b)))));
        }
    }
    open.retain(&is_possible);
    let mut rows = Vec::new();
    while let Some(first) = open.first().cloned() {
        let mut row = first;
        for f in 0..factors.len() {
            if row[f].is_some() {
                continue;
            }
            let with = |level| {
                let mut with = row.clone();
                with[f] = Some(level);
                with
            };
            let closed = |row: &Row| {
                let holds = |p: &&Row| {
                    p[f].is_some() && p.iter().zip(row).all(|(p, r)| p.is_none() || p == r)
                };
                open.iter().filter(holds).count()
            };
            let possible = levels(f).map(with).filter(&is_possible).rev();
            row = possible.max_by_key(closed).expect("a level is possible");
        }
        open.retain(|p| !p.iter().zip(&row).all(|(p, r)| p.is_none() || p == r));
        rows.push(row.into_iter().map(|level| level.expect("filled")).collect());
    }
    rows
}
