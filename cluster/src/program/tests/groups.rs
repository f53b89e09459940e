//! Groups across nodes.

use super::*;

fn serve_ear(mesh: &Mesh) -> (ServedEndpoint, GroupMember) {
    let node = mesh.node().to_string();
    let served = endpoint::<String, String>(mesh, "ear").serve(move |said: String| {
        let heard = format!("{node} heard {said}");
        async move { Ok(heard) }
    });
    let served = served.unwrap();
    let member = mesh.group::<String, String>("ears").unwrap().join(&served).unwrap();
    (served, member)
}

async fn members(group: &Group<String, String>, count: usize) {
    let mut watch = group.watch();
    let right = async { while group.members().len() != count && watch.next().await.is_some() {} };
    within(&format!("{count} members"), right).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_is_told_as_one() {
    let nodes = Nodes::new(2).await;
    let ((_a, _in_a), (_b, in_b)) = (serve_ear(nodes.a()), serve_ear(nodes.b()));
    let group = nodes.a().group::<String, String>("ears").unwrap();
    members(&group, 2).await;
    let heard: Vec<_> = group.broadcast(&"hi".to_owned()).await.into_iter().map(|(_, heard)| heard.unwrap()).collect();
    assert_eq!(heard, ["a heard hi", "b heard hi"]);
    drop(in_b);
    members(&group, 1).await;
    assert_eq!(group.broadcast(&"hi".to_owned()).await.len(), 1);
    assert_eq!(endpoint::<String, String>(nodes.a(), "ear").list_instances().len(), 2, "the endpoint goes on");
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_loses_the_members_of_a_node_that_dies_and_no_others() {
    let nodes = Nodes::new(3).await;
    let _ears: Vec<_> = nodes.all.iter().map(serve_ear).collect();
    let groups: Vec<_> = nodes.all.iter().map(|mesh| mesh.group::<String, String>("ears").unwrap()).collect();
    for group in &groups {
        members(group, 3).await;
    }
    kill(nodes.c()).await;
    // Between the death and the news of it, the dead one's answer is a typed error and the others answer.
    let answers = within("a broadcast", groups[0].broadcast(&"hi".to_owned())).await;
    for (id, answer) in answers {
        match answer {
            Ok(heard) => assert_eq!(heard, format!("{} heard hi", id.node)),
            Err(error) => assert_eq!((id.node.as_str(), error.fault()), ("c", None), "{error}"),
        }
    }
    for group in &groups[..2] {
        members(group, 2).await;
        let names: Vec<_> = group.members().iter().map(|member| member.id.node.to_string()).collect();
        assert_eq!(names, ["a", "b"], "every node lists the same");
    }
    let again = nodes.join("c").await;
    let _ear = serve_ear(&again);
    members(&groups[0], 3).await;
    within("all answer again", async {
        while groups[0].broadcast(&"hi".to_owned()).await.iter().filter(|(_, answer)| answer.is_ok()).count() < 3 {}
    })
    .await;
    again.leave().await;
    nodes.leave().await;
}

struct Ear(String);

impl Actor for Ear {
    type Request = String;
    type Reply = String;

    async fn handle(&mut self, said: String) -> Result<String, Fault> {
        assert!(said != "die", "asked to die");
        Ok(format!("{} heard {said}", self.0))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn actors_are_members_from_one_life_to_the_next_until_they_are_stopped() {
    let nodes = Nodes::new(2).await;
    let group = nodes.a().group::<String, String>("ears").unwrap();
    let (mut guards, mut actors) = (Vec::new(), Vec::new());
    for (mesh, name) in [(nodes.a(), "one"), (nodes.b(), "two"), (nodes.b(), "three")] {
        let actor = mesh.spawn(name, Restart::Permanent, move || Ear(name.to_owned())).await.unwrap();
        guards.push(group.join_actor(&actor).unwrap());
        actors.push(actor);
    }
    members(&group, 3).await;
    let told = |word: &'static str| {
        let group = group.clone();
        async move {
            group.broadcast(&word.to_owned()).await.into_iter().filter_map(|(_, heard)| heard.ok()).collect::<Vec<_>>()
        }
    };
    assert_eq!(told("hi").await, ["one heard hi", "three heard hi", "two heard hi"]);
    assert!(told("die").await.is_empty());
    within("all are back", async { while told("hi").await.len() < 3 {} }).await;
    assert_eq!(actors[1].stop().await, Ok(true));
    members(&group, 2).await;
    drop(guards.pop());
    members(&group, 1).await;
    assert_eq!(told("hi").await, ["one heard hi"]);
    assert_eq!(actors[2].ask("hi".to_owned()).await.unwrap(), "three heard hi", "it goes on without the group");
    drop((guards, actors));
    members(&group, 0).await;
    nodes.leave().await;
}
