//! Which operations compute channels last, what is transposed for it, and that results stay the same.

use super::{ChannelsLast, transposed_bytes};
use crate::fuse::tests::{feeds, fuse, outline, parse};
use crate::pass::{Changed, Pass, PassContext};
use frit_ir::Graph;
use frit_ir::interpret::{Options, run};
use frit_ir::plan::{DeviceType, Target};
use frit_ir::verify::verify;

fn pass(device: DeviceType) -> ChannelsLast {
    ChannelsLast { target: Target { device, arch: "sm_90".into(), features: String::new() } }
}

/// The graph after the pass, which must compute the same.
fn changed(graph: &Graph) -> (Graph, Changed) {
    let mut last = graph.clone();
    let found = pass(DeviceType::Cuda).run(&mut last, &mut PassContext::default()).unwrap();
    if let Err(broken) = verify(&last) {
        panic!("{}\n{last}", broken[0].message);
    }
    let feeds = feeds(graph);
    let evaluate = |g: &Graph| run(g, &feeds, Options::default()).expect("it evaluates");
    assert_eq!(evaluate(graph), evaluate(&last), "\n{graph}\n{last}");
    (last, found)
}

fn input(name: &str, shape: &str, dtype: &str) -> String {
    let ty = format!(r#"{{"dtype":"{dtype}","shape":[{shape}]}}"#);
    let shown = shape.replace(',', ", ");
    format!("%{name}: {dtype}[{shown}] = input {{name = \"{name}\", ty = {ty}}}\n")
}

const SLIDE: &str =
    r#"window = {"strides":[1,1],"dilations":[1,1],"low":[1,1],"high":[1,1]}, groups = 1"#;
const PLAIN: &str =
    r#"window = {"strides":[1,1],"dilations":[1,1],"low":[0,0],"high":[0,0]}, groups = 1"#;
const HALVE: &str =
    r#"window = {"strides":[2,2],"dilations":[1,1],"low":[0,0],"high":[0,0]}, taps = [2,2]"#;

/// A network of images `x`, two convolutions, and its loss's gradient `d` for the pooled features.
fn network() -> Graph {
    let leaves = [
        input("x", "2,3,8,8", "bf16"),
        input("k", "8,3,3,3", "bf16"),
        input("w", "16,8,1,1", "bf16"),
        input("s", "8", "f32"),
        input("b", "8", "f32"),
        input("c", "16,1,1", "bf16"),
        input("d", "2,16", "bf16"),
    ]
    .concat();
    parse(&format!(
        r#"{leaves}
        %h: bf16[2, 8, 8, 8] = conv %x, %k {{{SLIDE}}}
        %n: bf16[2, 8, 8, 8], %mean: f32[8], %var: f32[8] = batch_norm %h, %s, %b {{eps = 0.00001}}
        %r: bf16[2, 8, 8, 8] = relu %n
        %p: bf16[2, 8, 4, 4] = max_pool %r {{{HALVE}}}
        %y: bf16[2, 16, 4, 4] = conv %p, %w {{{PLAIN}}}
        %z: bf16[2, 16, 4, 4] = add %y, %c
        %m: bf16[2, 16] = reduce %z {{f = "mean", axes = [2,3]}}
        %e: bf16[2, 16, 1, 1] = reshape %d {{shape = [2,16,1,1]}} @backward
        %dz: bf16[2, 16, 4, 4] = expand %e {{shape = [2,16,4,4]}} @backward
        %dc: bf16[16, 1, 1] = sum_to %dz {{shape = [16,1,1]}} @backward
        %dw: bf16[16, 8, 1, 1] = conv_grad_weight %dz, %p {{{PLAIN}, taps = [1,1]}} @backward
        %dp: bf16[2, 8, 4, 4] = conv_grad_input %dz, %w {{{PLAIN}, size = [4,4]}} @backward
        %dr: bf16[2, 8, 8, 8] = max_pool_grad %dp, %r {{{HALVE}}} @backward
        %dn: bf16[2, 8, 8, 8] = relu_grad %dr, %r @backward
        %dh: bf16[2, 8, 8, 8], %ds: f32[8], %db: f32[8] = batch_norm_grad %dn, %h, %s, %mean, %var {{eps = 0.00001}} @backward
        %dk: bf16[8, 3, 3, 3] = conv_grad_weight %dh, %x {{{SLIDE}, taps = [3,3]}} @backward
        return %m as "m"
        return %mean as "mean"
        return %dc as "dc"
        return %dw as "dw"
        return %ds as "ds"
        return %db as "db"
        return %dk as "dk""#
    ))
}

#[test]
fn a_network_computes_channels_last() {
    let graph = network();
    let (last, found) = changed(&graph);
    assert_eq!(found, Changed::Yes);
    // Images and kernels of three channels stay as they are.
    assert_eq!(transposed_bytes(&last), 0);
    assert_eq!(
        outline(&fuse(&last)),
        "reshape; pointwise(expand) 1->1; sum_to; \
         channels_last(conv transpose) 2->1; \
         batch_norm(transpose batch_norm transpose relu) 3->3; \
         channels_last(transpose max_pool transpose) 1->1; \
         channels_last(transpose conv transpose) 2->1; \
         reshape; reshape; pointwise(add) 2->1; reduce; \
         reshape; pointwise(expand) 1->1; \
         channels_last(transpose transpose conv_grad_weight) 2->1; \
         channels_last(transpose conv_grad_input transpose) 2->1; \
         channels_last(transpose transpose max_pool_grad transpose) 2->1; \
         batch_norm(relu_grad transpose transpose batch_norm_grad transpose) 6->3; \
         channels_last(transpose conv_grad_weight) 2->1"
    );
}

#[test]
fn a_processor_keeps_its_images() {
    let mut graph = network();
    let found = pass(DeviceType::Cpu).run(&mut graph, &mut PassContext::default()).unwrap();
    assert_eq!(found, Changed::No);
}

#[test]
fn convolutions_between_other_operations_keep_their_images() {
    // Each convolution would transpose its images for itself, and the sum over groups of channels once more.
    let graph = parse(&format!(
        r#"{}{}
        %y: bf16[2, 8, 4, 4] = conv %x, %k {{{SLIDE}}}
        %g: bf16[2, 2, 64] = reshape %y {{shape = [2,2,64]}}
        %n: bf16[2, 2, 64] = softmax %g {{axis = 2}}
        %u: bf16[2, 8, 4, 4] = reshape %n {{shape = [2,8,4,4]}}
        %z: bf16[2, 8, 4, 4] = conv %u, %k {{{SLIDE}}}
        return %z as "z""#,
        input("x", "2,8,4,4", "bf16"),
        input("k", "8,8,3,3", "bf16"),
    ));
    assert_eq!(changed(&graph).1, Changed::No);
}

#[test]
fn axes_follow_their_channels() {
    let graph = parse(&format!(
        r#"{}{}
        %a: bf16[2, 8, 4, 4] = conv %x, %k {{{SLIDE}}}
        %b: bf16[2, 8, 4, 4] = conv %a, %k {{{SLIDE}}}
        %c: bf16[2, 16, 4, 4] = concat %a, %b {{axis = 1}}
        %l: bf16[2, 4, 4, 4], %r: bf16[2, 12, 4, 4] = split %c {{axis = 1, sizes = [4,12]}}
        %s: bf16[2, 8, 4, 4] = slice %r {{start = [0,2,0,0], size = [2,8,4,4], step = [1,1,1,1]}}
        %p: bf16[2, 8, 5, 6] = pad %s {{low = [0,0,1,0], high = [0,0,0,2], value = 1.0}}
        %q: bf16[2, 8, 5, 6] = conv %p, %k {{{SLIDE}}}
        %f: bf16[2, 30, 8] = reshape %q {{shape = [2,30,8]}}
        %i: bf16[2, 8, 30] = reshape %q {{shape = [2,8,30]}}
        %j: bf16[2, 30, 8] = transpose %i {{perm = [0,2,1]}}
        %k2: bf16[2, 8, 30] = transpose %j {{perm = [0,2,1]}}
        %l2: bf16[2, 8, 6, 5] = reshape %k2 {{shape = [2,8,6,5]}}
        %o: bf16[2, 8, 6, 5] = conv %l2, %k {{{SLIDE}}}
        %u: bf16[2, 6, 5, 8] = transpose %o {{perm = [0,2,3,1]}}
        %t: bf16[2, 5, 6, 8] = transpose %q {{perm = [0,2,3,1]}}
        %m: bf16[2, 1, 5, 6] = reduce %q {{f = "max", axes = [1], keep_dims = true}}
        %v: bf16[8, 6] = reduce %q {{f = "sum", axes = [0,2]}}
        %w: bf16[2, 1, 1, 6] = sum_to %q {{shape = [2,1,1,6]}}
        return %l as "l"
        return %f as "f"
        return %j as "j"
        return %u as "u"
        return %t as "t"
        return %m as "m"
        return %v as "v"
        return %w as "w""#,
        input("x", "2,8,4,4", "bf16"),
        input("k", "8,8,3,3", "bf16"),
    ));
    let (last, found) = changed(&graph);
    assert_eq!(found, Changed::Yes);
    // `x` and `k` once; what is read in another order: `l`, `f` and `v`.
    let moved = 2 * (2 * 8 * 16 + 8 * 8 * 9 + 2 * 4 * 16 + 2 * 8 * 30 + 8 * 6);
    assert_eq!(transposed_bytes(&last), moved);
}
