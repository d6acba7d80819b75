//! The contracts that passes declare hold, and an internal error of a pass writes a reproducer.

use crate::support::file;
use clap::Parser;
use frit::commands::{Cli, Command as CliCommand};
use frit::compilation::Request;
use frit::config::Config;
use frit::diagnostics::Report;
use frit::import::{self, ImportOptions};
use frit::pipeline::{self, Options};
use frit::reproducer;
use frit_ir::{Code, Diagnostic, verify};
use frit_passes::chunk_loss::{ChunkLoss, Chunks};
use frit_passes::cost::Device;
use frit_passes::recompute::Recompute;
use frit_passes::{Changed, PassContext};
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

#[test]
fn a_pass_that_says_it_changed_nothing_changed_nothing() {
    let mut unchanged = 0;
    for model in ["mlp", "gpt2", "resnet"] {
        for settings in [
            &["precision.compute=fp32"][..],
            &["precision.compute=bf16", "sharding.ranks=2", "model.batch_norm=sync"],
        ] {
            let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
            let config = Config::load(None, &settings).expect("known keys");
            let options = Options::new(&config).expect("implemented");
            let path = file(&format!("tests/models/{model}/model.onnx"));
            let binds = [("batch".to_string(), 4)].into();
            let imported =
                import::load(&path, &ImportOptions { binds, ..ImportOptions::default() });
            let mut graph = imported.unwrap_or_else(|e| panic!("{model}: {e}")).graph;
            let mut context = PassContext::default();
            let mut passes = pipeline::forward(&options);
            passes.extend(pipeline::training(&options, 64.0));
            passes.extend(pipeline::holding(&options));
            let none = BTreeSet::new();
            let chunk_loss = ChunkLoss { chunks: Chunks::Auto, device: Device::h100() };
            passes.extend(pipeline::distribution(&options, chunk_loss, Recompute::NONE, &none));
            for pass in passes {
                let (name, before) = (pass.info().name, graph.to_string());
                let changed = pass.run(&mut graph, &mut context);
                let changed = changed.unwrap_or_else(|e| panic!("{model}, {name}: {e}"));
                verify::verify(&graph).unwrap_or_else(|e| panic!("{model}, {name}: {e:?}"));
                if changed == Changed::No {
                    unchanged += 1;
                    assert_eq!(before, graph.to_string(), "{model}: {name} changed the graph");
                }
            }
        }
    }
    assert!(unchanged >= 12, "only {unchanged} passes left a graph as it was");
}

#[test]
fn an_internal_error_leaves_what_repeats_it() {
    let request = Request {
        model: file("tests/models/mlp/model.onnx"),
        binds: [("batch".to_string(), 4)].into(),
        disabled: vec!["fuse".into()],
        ..Request::default()
    };
    let config = Config::load(None, &["run.seed=7".to_string()]).expect("known keys");
    let parent = tempfile::tempdir().expect("a directory");
    let why = "V107: it broke\nin two lines";
    let folder = reproducer::write(&request, &config, why, parent.path()).expect("written");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect(name);
    assert!(read("train.toml").contains("seed = 7"));
    assert!(read("before.frit").contains("param"), "{}", read("before.frit"));
    let script = read("repeat.sh");
    for part in ["# V107: it broke\n# in two lines\n", "after pass `channels_last`"] {
        assert!(script.contains(part), "{script}");
    }
    // Its command is one that the program takes, with these arguments.
    let programs = tempfile::tempdir().expect("a directory");
    let program = programs.path().join("frit");
    std::fs::write(&program, "#!/bin/sh\nfor word in frit \"$@\"; do echo \"$word\"; done\n")
        .and_then(|()| std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)))
        .expect("written");
    let path = format!("{}:{}", programs.path().display(), env!("PATH"));
    let ended = Command::new("sh").arg(folder.join("repeat.sh")).env("PATH", path).output();
    let words = String::from_utf8(ended.expect("a shell").stdout).expect("UTF-8");
    let cli = Cli::try_parse_from(words.lines()).unwrap_or_else(|e| panic!("{words}: {e}"));
    let CliCommand::Compile(args) = cli.command else { panic!("{words}") };
    assert_eq!(args.model, Some(std::fs::canonicalize(&request.model).expect("a model")));
    assert_eq!((args.bind, args.disable_pass), (vec!["batch=4".into()], vec!["fuse".into()]));
    assert!(args.verify_each);
}

#[test]
fn only_internal_errors_are_given_a_reproducer() {
    let (request, config) = (Request::default(), Config::default());
    let fails = |code: &str| {
        let report =
            Report::from(Diagnostic::error(Code::find(code).expect("a code"), "it failed"));
        let ended: Result<(), Report> = reproducer::guarded(&request, &config, || Err(report));
        ended.expect_err("an error").to_string()
    };
    for code in ["B001", "V303", "P201"] {
        assert!(fails(code).contains("frit-internal-error-"), "{code}");
    }
    assert_eq!(fails("E020"), "it failed");
}
