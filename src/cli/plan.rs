//! `starling plan`: how many workers each model needs and what the planner does about it.

use clap::Args;
use starling_actors::{
    plan::{Outlook, words::Figures},
    planner::board::PlanRow,
    route::split::Role,
};

use super::{
    Failure,
    inspect::{Inspect, print_json},
    table,
};
use crate::control::{Plans, op};

const EXAMPLES: &str = "\
Examples:
  starling plan
  starling plan --json | jq '.plans[] | {model, wanted: .outlook.wanted}'
  starling up --planner act --planner-ttft-ms 300 --planner-max 6 \\
      --planner-hook /usr/local/bin/scale-workers

For each model one router plans, the first in rank of those that live; when it goes,
the next one takes over and changes nothing at first. NEED is the number of workers
that the load takes at the targets; USE the share of the workers' time that prompts
take, and the share of the batch that keeps the target that answers take.

--planner advise, the default, shows decisions and touches nothing. With act the
planner gives running workers other roles, when one side starves and the other does
not; as many workers as are needed are started and stopped by the program of
--planner-hook, which gets what is wanted as JSON on its standard input. A worker is
drained before it is stopped, and only one whose node has the role worker alone and
no other worker (`--role worker --workers 1`) is.

Exit codes: 0 printed, 2 wrong command line, 3 no node answered.";

/// Show how many workers each model needs, by role, and what the planner decided.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct ShowPlan {
    #[command(flatten)]
    inspect: Inspect,
}

impl ShowPlan {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let all: Plans = self.inspect.ask(op::PLAN, Vec::new()).await?;
        for missing in &all.missing {
            eprintln!("no answer from {}: {}", missing.node, missing.reason);
        }
        if self.inspect.json {
            return print_json(&all);
        }
        let columns = [
            "model",
            "role",
            "now",
            "wanted",
            "need",
            "use",
            "requests/s",
            "waiting",
            "ttft ms",
            "itl ms",
            "mode",
            "leader",
        ];
        let mut out = table::table(&columns);
        all.plans.iter().flat_map(cells).for_each(|row| {
            out.add_row(row);
        });
        table::print(out);
        for plan in &all.plans {
            println!();
            said(plan).iter().for_each(|line| println!("{line}"));
        }
        Ok(())
    }
}

/// A row for each role that the model has or should have.
fn cells(plan: &PlanRow) -> Vec<[String; 12]> {
    let Some(outlook) = &plan.outlook else { return vec![blank(plan)] };
    let figures = &outlook.figures;
    let roles = [Role::Both, Role::Prefill, Role::Decode].into_iter();
    let there = roles.filter(|role| outlook.now.count(*role) + outlook.wanted.count(*role) > 0);
    let row = |role: Role| {
        let (need, used) = side(outlook, role);
        [
            plan.model.clone(),
            role.to_string(),
            outlook.now.count(role).to_string(),
            outlook.wanted.count(role).to_string(),
            format!("{need:.1}"),
            used,
            format!("{:.1}", figures.rate),
            figures.waiting.to_string(),
            seen(figures.ttft_p50_ms, figures.ttft_p99_ms, plan.ttft_ms),
            seen(figures.itl_p50_ms, figures.itl_p99_ms, plan.itl_ms),
            plan.mode.to_string(),
            plan.leader.clone(),
        ]
    };
    there.map(row).collect()
}

/// Before the first look.
fn blank(plan: &PlanRow) -> [String; 12] {
    let mut row = [(); 12].map(|()| "-".to_owned());
    row[0].clone_from(&plan.model);
    row[10] = plan.mode.to_string();
    row[11].clone_from(&plan.leader);
    row
}

/// Workers that a role's work takes, and how far those that are there are used.
fn side(outlook: &Outlook, role: Role) -> (f64, String) {
    let Figures { prefill_use, decode_use, .. } = outlook.figures;
    let share = |of: f64| format!("{:.0} %", of * 100.0);
    match role {
        Role::Both if !outlook.now.has_specialists() => {
            let need = outlook.need.prefill + outlook.need.decode;
            (need, format!("{} + {}", share(prefill_use), share(decode_use)))
        }
        // What those of one role leave over.
        Role::Both => {
            let over = |need: f64, own: u32| (need - f64::from(own)).max(0.0);
            let need = over(outlook.need.prefill, outlook.now.prefill) + over(outlook.need.decode, outlook.now.decode);
            (need, "-".to_owned())
        }
        Role::Prefill => (outlook.need.prefill, share(prefill_use)),
        Role::Decode => (outlook.need.decode, share(decode_use)),
    }
}

/// The middle and the slowest in a hundred beside the target.
fn seen(p50: Option<f64>, p99: Option<f64>, target: f64) -> String {
    match p50.zip(p99) {
        Some((p50, p99)) => format!("{p50:.0}/{p99:.0} of {target:.0}"),
        None => format!("- of {target:.0}"),
    }
}

/// What it says now, and the decisions before.
fn said(plan: &PlanRow) -> Vec<String> {
    let now = plan.outlook.as_ref().map_or_else(
        || "has not looked at a whole interval yet".to_owned(),
        |outlook| format!("{}: {}", outlook.decision.action, outlook.decision.reason),
    );
    let mut lines = vec![format!("{}: {now}", plan.model)];
    lines.extend(plan.past.iter().map(|past| {
        let ago = table::duration(past.ago_secs);
        format!("  {ago} ago, {}: {} ({})", past.outcome, past.action, past.reason)
    }));
    lines
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use starling_actors::plan::{Action, Decision, Fleet, Mode, fleet::Sides};

    use super::*;

    fn plan() -> PlanRow {
        let decision = Decision { action: Action::Hold, reason: "the workers suffice".to_owned() };
        let now = Fleet { both: 0, prefill: 1, decode: 3 };
        let figures = Figures {
            rate: 2.04,
            ttft_p50_ms: Some(120.4),
            ttft_p99_ms: Some(480.0),
            prefill_use: 0.5,
            decode_use: 0.251,
            ..Figures::default()
        };
        let need = Sides { prefill: 0.62, decode: 0.9 };
        let outlook = Outlook { decision, now, wanted: now, need, pressure: 0.62, figures, cools: Duration::ZERO };
        PlanRow {
            model: "m".to_owned(),
            leader: "a".to_owned(),
            mode: Mode::Advise,
            leads_secs: 70,
            looked_secs: Some(3),
            interval_secs: 10,
            ttft_ms: 500.0,
            itl_ms: 50.0,
            min: 1,
            max: 8,
            predictor: "constant".to_owned(),
            hook: false,
            outlook: Some(outlook),
            past: Vec::new(),
        }
    }

    #[test]
    fn a_model_has_a_row_for_each_of_its_roles() {
        let rows = cells(&plan());
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0][1..7], ["prefill", "1", "1", "0.6", "50 %", "2.0"]);
        assert_eq!(rows[1][7..], ["0", "120/480 of 500", "- of 50", "advise", "a"]);
        assert_eq!(said(&plan()), ["m: hold: the workers suffice"]);
        assert_eq!(cells(&PlanRow { outlook: None, ..plan() })[0][1], "-");
    }
}
