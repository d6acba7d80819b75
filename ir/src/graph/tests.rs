//! Edits of graphs.

use super::{Graph, NodeId, OutputKind, ValueId};
use crate::ops::{BinaryFn, Input, Op, UnaryFn};
use crate::{DType, Origin, Region, TensorType};
use std::collections::HashMap;

fn add(graph: &mut Graph, op: Op, inputs: &[ValueId]) -> ValueId {
    graph.add1(op, inputs, Origin::none(), Region::Forward).expect("operands fit")
}

fn input(graph: &mut Graph, name: &str) -> ValueId {
    let ty = TensorType::new(DType::F32, [2]);
    add(graph, Op::Input(Input { name: name.into(), ty }), &[])
}

fn neg(graph: &mut Graph, x: ValueId) -> ValueId {
    add(graph, Op::Unary(UnaryFn::Neg), &[x])
}

fn defs(graph: &Graph, values: &[ValueId]) -> Vec<NodeId> {
    values.iter().map(|v| graph.value(*v).def).collect()
}

#[test]
fn a_misfit_names_place_and_operands() {
    let mut graph = Graph::new("g");
    let x = input(&mut graph, "x");
    let error = graph
        .add(Op::Select, &[x], Origin::new("/where", ""), Region::Forward)
        .expect_err("too few operands");
    let expected = "select at node \"/where\": expected 3 operands, found 1 (operands: f32[2])";
    assert_eq!(error.to_string(), expected);
    assert_eq!(graph.len(), 1);
}

#[test]
fn substitution_follows_chains_and_reaches_outputs() {
    let mut graph = Graph::new("g");
    let x = input(&mut graph, "x");
    let [a, b, c] = [0; 3].map(|_| neg(&mut graph, x));
    let sum = add(&mut graph, Op::Binary(BinaryFn::Add), &[a, b]);
    graph.add_output("a", a, OutputKind::Result);
    graph.substitute(&HashMap::from([(a, b), (b, c)]));
    assert_eq!(graph.def(sum).inputs, [c, c]);
    assert_eq!(graph.outputs[0].value, c);
    let users = graph.users();
    assert!(users[a.0 as usize].is_empty());
    assert_eq!(users[c.0 as usize], [graph.value(sum).def; 2]);
}

#[test]
#[should_panic(expected = "a replacement must keep the type")]
fn substitution_keeps_types() {
    let mut graph = Graph::new("g");
    let x = input(&mut graph, "x");
    let test = add(&mut graph, Op::Predicate(crate::ops::PredicateFn::IsNan), &[x]);
    graph.replace_uses(x, test);
}

#[test]
fn sorting_moves_late_nodes_before_their_first_user() {
    let mut graph = Graph::new("g");
    let x = input(&mut graph, "x");
    let a = neg(&mut graph, x);
    let b = neg(&mut graph, a);
    let c = neg(&mut graph, b);
    let late = neg(&mut graph, x);
    graph.set_inputs(graph.value(c).def, vec![late]).expect("the type stays");
    graph.sort().expect("no cycle");
    assert_eq!(graph.order(), defs(&graph, &[x, a, b, late, c]));
    let before = graph.clone();
    graph.sort().expect("no cycle");
    assert_eq!(graph, before);
}

#[test]
fn sorting_finds_cycles() {
    let mut graph = Graph::new("g");
    let x = input(&mut graph, "x");
    let a = neg(&mut graph, x);
    let b = neg(&mut graph, a);
    graph.set_inputs(graph.value(a).def, vec![b]).expect("the type stays");
    let cycle = graph.sort().expect_err("a cycle");
    assert!(defs(&graph, &[a, b]).iter().all(|n| cycle.contains(n)));
}

#[test]
fn new_operands_keep_the_types_of_results() {
    let mut graph = Graph::new("g");
    let x = input(&mut graph, "x");
    let ty = TensorType::new(DType::F32, [3]);
    let other = add(&mut graph, Op::Input(Input { name: "o".into(), ty }), &[]);
    let a = neg(&mut graph, x);
    let id = graph.value(a).def;
    assert!(graph.set_inputs(id, vec![other]).is_err());
    assert!(graph.set_inputs(id, vec![x, x]).is_err());
    assert_eq!(graph.node(id).inputs, [x]);
}

#[test]
fn dead_nodes_go_and_carried_leaves_stay() {
    let mut graph = Graph::new("g");
    let x = input(&mut graph, "x");
    let state = input(&mut graph, "s");
    let unused = input(&mut graph, "u");
    let a = neg(&mut graph, x);
    let dead = neg(&mut graph, unused);
    graph.add_output("s", a, OutputKind::Carry(state));
    assert_eq!(graph.remove_dead(), 2);
    assert_eq!(graph.order(), defs(&graph, &[x, state, a]));
    assert!(!graph.is_live(graph.value(dead).def) && graph.is_live(graph.value(state).def));
    assert_eq!(graph.remove_dead(), 0);
}
