//! Collectives, whose terms have an index for the rank.

use super::{Numbers, leaves, types, wrong};
use crate::gradient::tests::draw::Draw;
use crate::gradient::tests::{add, param};
use crate::reading::{Ranks, Reading};
use crate::term::Terms;

use frit_ir::interpret::{Options, run_ranks};
use frit_ir::ops::*;
use frit_ir::plan::UnitId;
use frit_ir::{DType, Graph, OutputKind, Tensor, TensorType, ValueId};
use std::collections::HashMap;

const TEAMS: [Ranks; 4] = [
    Ranks { shards: 1, replicas: 1 },
    Ranks { shards: 3, replicas: 1 },
    Ranks { shards: 1, replicas: 3 },
    Ranks { shards: 2, replicas: 3 },
];

/// A graph that reads an input and a parameter, with values of both for each rank.
fn graph(
    ranks: Ranks,
    build: impl FnOnce(&mut Graph, ValueId, ValueId) -> ValueId,
) -> (Graph, Vec<HashMap<String, Tensor>>) {
    let mut g = Graph::new("g");
    let ty = TensorType::new(DType::F64, [2, 3]);
    let input = add(&mut g, Op::Input(Input { name: "x".into(), ty: ty.clone() }), &[])[0];
    let weight = add(&mut g, param("w", ty, ParamKind::Trainable), &[])[0];
    let result = build(&mut g, input, weight);
    g.add_output("y", result, OutputKind::Result);
    let draw = &mut Draw::new(1);
    let weight = draw.floats([2, 3]).0;
    let feeds = (0..ranks.number()).map(|_| {
        let feeds = [("x", draw.floats([2, 3]).0), ("w", weight.clone())];
        feeds.map(|(name, x)| (name.to_string(), x)).into()
    });
    let feeds = feeds.collect();
    (g, feeds)
}

/// Elements of the result on each rank, by its term.
fn by_term(graph: &Graph, ranks: Ranks, feeds: &[HashMap<String, Tensor>]) -> Vec<Vec<f64>> {
    let mut t = Terms::default();
    let reading = Reading::new(&mut t, graph, ranks);
    let numbers = Numbers::new(&t, &leaves(graph, feeds), types(graph));
    let output = graph.outputs[0].value;
    let of_rank = |rank: usize| {
        let (shard, replica) = (rank % ranks.shards, rank / ranks.shards);
        let values = vec![(ranks.of_shards(), shard as i64), (ranks.of_replicas(), replica as i64)];
        numbers.elements(reading.of(output), graph.ty(output).shape.dims(), &values).1
    };
    (0..ranks.number()).map(of_rank).collect()
}

/// The same by the interpreter, which executes those ranks together that exchange elements.
fn by_interpreter(
    graph: &Graph,
    feeds: &[HashMap<String, Tensor>],
    team: impl Fn(usize) -> usize,
) -> Vec<Vec<f64>> {
    let mut results = vec![vec![]; feeds.len()];
    for first in 0..feeds.len() {
        let members: Vec<usize> = (0..feeds.len()).filter(|r| team(*r) == team(first)).collect();
        let given: Vec<_> = members.iter().map(|r| feeds[*r].clone()).collect();
        let found = run_ranks(graph, &given, Options::EXACT).expect("evaluates");
        for (rank, outputs) in members.into_iter().zip(found) {
            results[rank] = outputs[0].1.to_f64s();
        }
    }
    results
}

fn agree(
    ranks: Ranks,
    team: impl Fn(usize) -> usize,
    build: impl Fn(&mut Graph, ValueId, ValueId) -> ValueId,
) {
    let (graph, feeds) = graph(ranks, build);
    let (found, expected) = (by_term(&graph, ranks, &feeds), by_interpreter(&graph, &feeds, team));
    for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let wrong = wrong(found, expected);
        assert!(
            wrong.is_none(),
            "rank {rank} of {ranks:?}: {}\n{graph}",
            wrong.unwrap_or_default()
        );
    }
}

#[test]
fn reductions_are_over_the_ranks_of_their_team() {
    let unit = UnitId(0);
    for ranks in TEAMS {
        for reduce in [ReduceKind::Sum, ReduceKind::Mean] {
            for dtype in [None, Some(DType::F16), Some(DType::F64)] {
                // The ranks that share one copy.
                let copy = |rank: usize| rank / ranks.shards;
                let scatter = Op::ReduceScatter(ReduceScatter { reduce, unit, dtype });
                agree(ranks, copy, |g, x, w| {
                    let product = add(g, Op::Binary(BinaryFn::Mul), &[x, w])[0];
                    add(g, scatter.clone(), &[product])[0]
                });
                // Those that hold the same part of all copies.
                let part = |rank: usize| if ranks.shards == 1 { 0 } else { rank % ranks.shards };
                let op = Op::AllReduce(AllReduce { reduce, unit: Some(unit), dtype });
                agree(ranks, part, |g, x, _| add(g, op.clone(), &[x])[0]);
                let op = Op::AllReduce(AllReduce { reduce, unit: None, dtype });
                agree(
                    ranks,
                    |_| 0,
                    |g, x, w| {
                        let sum = add(g, Op::Binary(BinaryFn::Add), &[x, w])[0];
                        let squares = add(g, Op::Binary(BinaryFn::Mul), &[sum, sum])[0];
                        add(g, op.clone(), &[squares])[0]
                    },
                );
                // Of what is the same on all ranks.
                agree(ranks, |_| 0, |g, _, w| add(g, op.clone(), &[w])[0]);
            }
        }
    }
}

#[test]
fn gathers_are_of_whole_values() {
    for ranks in TEAMS {
        let op = Op::AllGather(AllGather { unit: UnitId(0) });
        agree(ranks, |_| 0, |g, _, w| add(g, op.clone(), &[w])[0]);
    }
}

#[test]
fn statistics_of_parts_are_those_of_the_whole_in_sum() {
    for ranks in TEAMS {
        let stats = |g: &mut Graph, whole: bool, x: ValueId| {
            let (reduce, unit, dtype) = (ReduceKind::Mean, UnitId(0), None);
            let scatter = Op::ReduceScatter(ReduceScatter { reduce, unit, dtype });
            let all_reduce = Op::AllReduce(AllReduce { reduce, unit: None, dtype });
            let x = add(g, if whole { all_reduce } else { scatter }, &[x])[0];
            add(g, Op::GradStats(GradStats { exact: false }), &[x])[0]
        };
        let (whole, feeds) = graph(ranks, |g, x, _| stats(g, true, x));
        let (parts, _) = graph(ranks, |g, x, _| stats(g, false, x));
        for replica in 0..ranks.replicas {
            let members = replica * ranks.shards..(replica + 1) * ranks.shards;
            let copy = |rank: usize| rank / ranks.shards;
            let expected = &by_interpreter(&whole, &feeds, copy)[members.start];
            let found = &by_term(&parts, ranks, &feeds)[members];
            let sum: Vec<f64> = (0..2).map(|k| found.iter().map(|x| x[k]).sum()).collect();
            assert!(wrong(&sum, expected).is_none(), "{ranks:?}: {sum:?}, expected {expected:?}");
        }
    }
}
