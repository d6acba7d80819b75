//! The live line of `frit run` on a terminal: a pseudo-terminal, whose screen a terminal emulator keeps.

use crate::support::{Planned, file, plan_to_evaluate};
use clap::Parser;
use frit::commands::{Cli, execute};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Command, Stdio};

/// The arguments of the program that the test starts in a terminal: itself.
const ARGUMENTS: &str = "FRIT_TERMINAL_ARGUMENTS";

/// The same for a program whose output does not fit a disk.
const FULL: &str = "FRIT_FULL_ARGUMENTS";

/// What a program writes on a terminal of this many columns.
fn in_terminal(arguments: &[&str], columns: u16, variables: &[(&str, &str)]) -> Vec<u8> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
    grantpt(&master).expect("granted");
    unlockpt(&master).expect("unlocked");
    let name = ptsname(&master, Vec::new()).expect("a name").into_string().expect("text");
    let terminal = OpenOptions::new().read(true).write(true).open(name).expect("a terminal");
    let size = Winsize { ws_row: 50, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&terminal, size).expect("a size");
    let side = || Stdio::from(terminal.try_clone().expect("a handle"));
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "terminal::a_run_shows_one_live_line", "--nocapture"])
        .env(ARGUMENTS, arguments.join("\n"))
        .env("TERM", "xterm")
        .env_remove("NO_COLOR")
        .envs(variables.iter().copied())
        .stdin(side())
        .stdout(side())
        .stderr(side())
        .spawn()
        .expect("a process");
    drop(terminal);
    let (mut written, mut master) = (vec![], File::from(master));
    let mut part = [0; 4096];
    // When the program has ended, reading fails.
    while let Ok(n) = master.read(&mut part)
        && n > 0
    {
        written.extend(&part[..n]);
    }
    assert!(child.wait().expect("an end").success(), "{}", String::from_utf8_lossy(&written));
    written
}

/// The lines of every screen on the way, and of the last.
fn screens(written: &[u8], columns: u16) -> (Vec<Vec<String>>, Vec<String>) {
    let mut terminal = vt100::Parser::new(50, columns, 0);
    let lines = |terminal: &vt100::Parser| -> Vec<String> {
        let rows = terminal.screen().rows(0, columns).map(|row| row.trim_end().to_string());
        rows.filter(|row| !row.is_empty()).collect()
    };
    let mut all: Vec<Vec<String>> = vec![];
    for part in written.split_inclusive(|byte| *byte == b'\r' || *byte == b'\n') {
        terminal.process(part);
        all.push(lines(&terminal));
    }
    let last = lines(&terminal);
    (all, last)
}

fn arguments(planned: &Planned, steps: &str, data: &str) -> Vec<String> {
    let plan = planned.path().to_string_lossy().into_owned();
    ["run", &plan, "--data", data, "--steps", steps, "--threads", "1"].map(String::from).to_vec()
}

/// Steps, columns, groups of arguments, and variables.
type Case<'a> = (&'a str, u16, &'a [&'a [&'a str]], &'a [(&'a str, &'a str)]);

/// Also what runs in the terminal.
#[test]
fn a_run_shows_one_live_line() {
    if let Ok(arguments) = std::env::var(ARGUMENTS) {
        let cli =
            Cli::try_parse_from([&["frit"], &*arguments.lines().collect::<Vec<_>>()].concat());
        match execute(&cli.expect("arguments")) {
            Ok(text) => {
                // Printed as the program does, not captured.
                let _ = std::io::stdout().write_all(text.as_bytes());
                return;
            }
            Err(report) => panic!("{report}"),
        }
    }
    let planned = plan_to_evaluate("tests/models/gpt2/model.onnx", 4, &["sharding.ranks=2"]);
    let data = file("tests/models/gpt2/data.safetensors").to_string_lossy().into_owned();
    let in_dir = |name: &str| planned.dir.path().join(name).to_string_lossy().into_owned();
    let (metrics, checkpoints) = (in_dir("metrics.jsonl"), in_dir("ckpt"));
    let validated = ["--validation", &data, "--validate-every", "4"];
    let saved = ["--checkpoint", &checkpoints, "--checkpoint-every", "4", "--resume"];
    let file = ["--metrics", &metrics];
    let printed = ["--metrics", "/dev/stdout"];
    let none: &[(&str, &str)] = &[];
    let cases: [Case<'_>; 7] = [
        ("12", 120, &[&file], none),
        // The file has lines of another run: a warning.
        ("12", 120, &[&file, &validated], none),
        ("8", 120, &[&saved, &validated], none),
        ("12", 120, &[&saved, &file, &validated], none),
        ("12", 240, &[&printed, &validated], none),
        ("12", 44, &[&validated], &[("NO_COLOR", "1")]),
        ("12", 120, &[&validated], &[("TERM", "dumb")]),
    ];
    for (steps, columns, more, variables) in cases {
        let case = format!("{more:?} {columns} {variables:?}");
        let mut all = arguments(&planned, steps, &data);
        all.extend(more.iter().flat_map(|m| m.iter().map(|word| word.to_string())));
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let written = in_terminal(&all, columns, variables);
        let text = String::from_utf8_lossy(&written).into_owned();
        let is_live = |line: &&String| line.contains(" of ") && line.contains(" · ");
        let (screens, last) = screens(&written, columns);
        let most = screens.iter().map(|s| s.iter().filter(is_live).count()).max();
        if variables.contains(&("TERM", "dumb")) {
            assert!(!text.contains('\u{1b}') && most == Some(0), "{case}: {text}");
            continue;
        }
        assert_eq!(most, Some(1), "{case}: one line at a time: {text}");
        assert_eq!(last.iter().filter(is_live).count(), 0, "{case}: {last:?}");
        let live: Vec<&String> = screens.iter().flatten().filter(is_live).collect();
        assert!(live.iter().any(|l| l.contains("loss ")), "{case}: {live:?}");
        if columns >= 120 {
            let whole = |l: &&&String| {
                l.contains(" tokens/s · ") && l.contains("iB · ") && l.ends_with(" left")
            };
            assert!(live.iter().any(|l| whole(&l)), "{case}: {live:?}");
        }
        let has_color = text.contains("\u{1b}[36m");
        assert_eq!(has_color, columns >= 120, "{case}: {text:?}");
        if more.contains(&&validated[..]) {
            // A narrow screen wraps the summary.
            let words = last.join("").replace(' ', "");
            assert!(words.contains("validationloss"), "{case}: {last:?}");
        }
        // What is printed beside the line is whole.
        let lines: Vec<&String> = last.iter().filter(|l| l.starts_with("{\"step\":")).collect();
        // Twelve steps, and validations after 5, 10 and 12.
        let expected = if more[0] == printed { 15 } else { 0 };
        assert_eq!(lines.len(), expected, "{case}: {last:?}");
        let warned = text.contains("warning: ");
        assert_eq!(warned, more[0] == file && more.len() == 2, "{case}: {text}");
    }
}

/// Also what runs.
#[test]
fn output_that_cannot_be_written_is_an_error() {
    if let Ok(arguments) = std::env::var(FULL) {
        let full = OpenOptions::new().write(true).open("/dev/full").expect("the device");
        rustix::stdio::dup2_stdout(full).expect("standard output");
        let arguments = [&["frit"], &*arguments.lines().collect::<Vec<_>>()].concat();
        let code = frit::commands::main(arguments.into_iter().map(Into::into));
        std::process::exit(i32::from(code));
    }
    let planned = plan_to_evaluate("tests/models/mlp/model.onnx", 4, &[]);
    let path = planned.path().to_string_lossy().into_owned();
    let data = file("tests/models/mlp/data.safetensors").to_string_lossy().into_owned();
    for arguments in [
        &["passes"][..],
        &["--help"],
        &["inspect", &path, "--json"],
        &["verify", &path, "--quick"],
        &["eval", &path, "--data", &data, "--json"],
        &["run", &path, "--data", &data, "--steps", "1"],
    ] {
        let ended = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "terminal::output_that_cannot_be_written_is_an_error", "--nocapture"])
            .env(FULL, arguments.join("\n"))
            .output()
            .expect("a process");
        let errors = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(2), "{arguments:?}: {errors}");
        assert!(errors.contains("standard output"), "{arguments:?}: {errors}");
    }
}
