//! The page of `frit report` in a real browser, Chromium without a window: its script runs without errors, the timeline is zoomed, moved
//! and named by pointer, wheel, keys and buttons, and every part is drawn where it belongs, in light and dark, on screens of all widths.

use crate::report::{check, page, trained};
use crate::support::{file, plan_to_evaluate};
use frit_tests::requirements::Requirement;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs Chromium on a page; its standard output.
fn chromium(page: &Path, size: (u32, u32), options: &[&str]) -> Option<String> {
    let program = Requirement::Chromium.find()?;
    let profile = tempfile::tempdir().expect("a directory");
    let stdout = profile.path().join("stdout");
    let mut child = Command::new(program)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--hide-scrollbars", "--force-device-scale-factor=1", "--virtual-time-budget=20000"])
        .arg(format!("--user-data-dir={}", profile.path().join("profile").display()))
        .arg(format!("--window-size={},{}", size.0, size.1))
        .args(options)
        .arg(format!("file://{}", page.display()))
        .stdout(std::fs::File::create(&stdout).expect("a file"))
        .stderr(Stdio::null())
        .spawn()
        .expect("Chromium starts");
    let began = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if began.elapsed() > Duration::from_secs(240) {
            child.kill().expect("killed");
            panic!("Chromium does not end");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(std::fs::read_to_string(stdout).expect("its output"))
}

/// The page with what records errors before all else, and the probe after all else.
fn probed(page: &str, to: &Path) -> PathBuf {
    // Without a window there are few frames.
    let record = "<script>window.failures=[];window.requestAnimationFrame=f=>setTimeout(f,0);addEventListener('error',e=>failures.push(e.message));\
                  addEventListener('securitypolicyviolation',e=>failures.push(e.violatedDirective));\
                  console.error=console.warn=(...a)=>failures.push(a.join(' '));</script>";
    let probe = std::fs::read_to_string(file("tests/browser/probe.js")).expect("the probe");
    let page = page.replacen("<head>", &format!("<head>{record}"), 1);
    let page = page.replace("</body>", &format!("<script>{probe}</script></body>"));
    std::fs::write(to, page).expect("written");
    to.to_path_buf()
}

/// What the probe found, in a window or in a frame of it.
fn found(dom: &str) -> Value {
    let text = dom.split("<pre id=\"found\"").nth(1).and_then(|t| t.split('>').nth(1));
    let text = text.and_then(|t| t.split("</pre").next()).unwrap_or_else(|| panic!("{dom}"));
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// A page that shows another in a frame of the width of a telephone, which no window can be made as narrow as.
fn framed(page: &Path, width: u32, height: u32) -> PathBuf {
    let to = page.with_extension("framed.html");
    let html = format!(
        "<!doctype html><body style='margin:0'><iframe src='{}' style='width:{width}px;height:{height}px;border:0'></iframe>\
         <script>addEventListener('message',e=>document.body.append(Object.assign(document.createElement('pre'),\
         {{id:'found',hidden:true,textContent:e.data}})))</script>",
        page.file_name().expect("a name").to_string_lossy()
    );
    std::fs::write(&to, html).expect("written");
    to
}

/// The pixels of a picture, as RGB, and its width.
fn pixels(path: &Path) -> (Vec<[u8; 3]>, usize) {
    let file = std::io::BufReader::new(std::fs::File::open(path).expect("a picture"));
    let mut reader = png::Decoder::new(file).read_info().expect("a PNG");
    let mut bytes = vec![0; reader.output_buffer_size().expect("a size")];
    let info = reader.next_frame(&mut bytes).expect("a picture");
    let channels = info.color_type.samples();
    let pixels = bytes[..info.buffer_size()].chunks(channels).map(|p| [p[0], p[1], p[2]]);
    (pixels.collect(), info.width as usize)
}

fn numbers(value: &Value) -> Vec<f64> {
    let all = value.as_array().unwrap_or_else(|| panic!("{value}"));
    all.iter().map(|x| x.as_f64().expect("a number")).collect()
}

/// Checks what the probe found on the page of a plan with this many spans and runs of this many steps.
fn check_found(found: &Value, spans: usize, case: &str) {
    assert_eq!(found["errors"], serde_json::json!([]), "{case}");
    assert_eq!(found["tasks"], spans, "{case}");
    let drawn = found["drawn"].as_u64().expect("a number") as usize;
    assert!(drawn > 20 && drawn <= spans, "{case}: {drawn} of {spans} spans are drawn");
    assert!(found["named"].as_u64() > Some(10), "{case}: {found}");
    let view = |key: &str| (numbers(&found[key])[0], numbers(&found[key])[1]);
    let width = |key: &str| view(key).1 - view(key).0;
    assert!(width("wheel") < 0.95 * width("whole"), "{case}: the wheel zooms: {found}");
    assert!(view("dragged").0 < view("wheel").0, "{case}: dragging moves: {found}");
    assert!(width("key") < 0.6 * width("dragged"), "{case}: + zooms: {found}");
    assert!(view("moved").0 > view("key").0, "{case}: an arrow moves: {found}");
    assert_eq!(found["back"], found["whole"], "{case}: 0 shows all");
    assert!((width("button") / width("whole") - 0.5).abs() < 0.01, "{case}: a button zooms");
    let selected = found["selected"].as_array().expect("two tasks");
    assert!(selected[0] != selected[1], "{case}: {found}");
    assert!(selected[0].as_str().is_some_and(|s| s.contains("predicted")), "{case}: {found}");
    assert_eq!(found["left"], "", "{case}");
    let value = found["value"].as_str().expect("values");
    assert!(value.contains("step 5") && value.contains("metrics"), "{case}: {value}");
    assert!(found["curves"].as_u64() > Some(4) && found["hidden"] == 0, "{case}: {found}");
    assert_eq!(found["overflow"], 0, "{case}: nothing is wider than the screen");
}

#[test]
fn the_page_works_in_a_browser_of_any_width_in_light_and_dark() {
    if Requirement::Chromium.find().is_none() {
        return;
    }
    let settings = ["sharding.ranks=2", "precision.compute=bf16", "run.accumulation=2"];
    let planned = plan_to_evaluate("tests/models/gpt2/model.onnx", 4, &settings);
    let (metrics, trace) = trained(&planned, "gpt2", 6);
    let args = ["--metrics".as_ref(), &*metrics, "--trace".as_ref(), &*trace];
    let html = page(&planned, &args).expect("a page");
    check(&html, "in the browser");
    // Pictures and pages are kept for people to look at.
    let dir = &file("target/report");
    std::fs::create_dir_all(dir).expect("a folder");
    std::fs::write(dir.join("report.html"), &html).expect("written");
    let probed = probed(&html, &dir.join("probed.html"));
    let plan = &planned.compiled.plan;
    let runs: usize = plan.tasks.keys().map(|i| plan.runs(i)).sum();
    let spans = runs * 3;
    let dom = |page: &Path, size| chromium(page, size, &["--dump-dom"]).expect("it was found");
    let screens = [(2560, 5000, false), (1366, 7000, false), (1366, 7000, true)];
    for (width, height, dark) in screens {
        let case = format!("{width} pixels, dark: {dark}");
        let mut options = vec!["--dump-dom"];
        if dark {
            options.push("--blink-settings=preferredColorScheme=0");
        }
        let dom = chromium(&probed, (width, height), &options).expect("it was found");
        let found = found(&dom);
        check_found(&found, spans, &case);
        let picture = dir.join(format!("{width}{}.png", if dark { "-dark" } else { "" }));
        options[0] = "--screenshot";
        let to = format!("--screenshot={}", picture.display());
        options[0] = &to;
        chromium(&dir.join("report.html"), (width, height), &options).expect("it was found");
        let (pixels, across) = pixels(&picture);
        assert_eq!(across, width as usize, "{case}");
        let corner = pixels[0];
        let sum: u32 = corner.iter().map(|c| u32::from(*c)).sum();
        assert_eq!(sum < 200, dark, "{case}: {corner:?}");
        for (selector, place) in found["regions"].as_object().expect("regions") {
            let [x, y, w, h] = numbers(place)[..] else { panic!("{place}") };
            assert!(w > 100.0 && h > 20.0, "{case}: {selector} {place}");
            let (mut drawn, mut all, mut colors) = (0, 0, std::collections::BTreeSet::new());
            for row in y as usize..(y + h) as usize {
                for pixel in &pixels[row * across + x as usize..row * across + (x + w) as usize] {
                    all += 1;
                    drawn += usize::from(*pixel != corner);
                    colors.insert(*pixel);
                }
            }
            let share = drawn as f64 / f64::from(all);
            assert!(
                share > 0.005 && colors.len() > 8,
                "{case}: {selector}: {share}, {}",
                colors.len()
            );
        }
        let regions = found["regions"].as_object().expect("regions");
        assert_eq!(regions.len(), 6, "{case}: {regions:?}");
        let tops: Vec<f64> = regions.values().map(|r| numbers(r)[1]).collect();
        assert!(tops[0] < tops[2] && tops[2] < tops[1] && tops[1] < tops[3] && tops[3] < tops[4]);
        assert!(tops[4] < tops[5], "{case}: {tops:?}");
    }
    let picture = format!("--screenshot={}", dir.join("390.png").display());
    let narrow = framed(&dir.join("report.html"), 390, 9000);
    chromium(&narrow, (390, 9000), &[&picture]).expect("it was found");
    let telephone = found(&dom(&framed(&probed, 390, 9000), (800, 9000)));
    assert_eq!(telephone["width"], 390);
    check_found(&telephone, spans, "a telephone");
}
